"""python -m anabranch: the `anabranch` command where it is not installed."""

from anabranch.llm.cli import main

main()
