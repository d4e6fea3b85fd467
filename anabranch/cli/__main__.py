"""python -m anabranch.cli: the `anabranch` command where it is not installed."""

from anabranch.cli import main

main()
