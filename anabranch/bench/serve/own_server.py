"""python -m anabranch.bench.serve.own_server JSON: our server, for the length of a benchmark."""

from __future__ import annotations

import json
import sys
from typing import Any

from anabranch.bench.engine.errors import EXPECTED, one_line


def main(given: dict[str, Any]) -> int:
    """Serve until SIGTERM."""
    from anabranch.engine.config import EngineConfig, SpeculativeConfig
    from anabranch.server.command import serve
    from anabranch.server.limits import ServerLimits

    engine: dict[str, Any] = given["engine"]
    if engine.get("speculative"):
        engine["speculative"] = SpeculativeConfig(**engine["speculative"])
    limits = ServerLimits(max_queue=given["max_queue"], max_request_seconds=given["max_seconds"])
    serve(EngineConfig(**engine), port=given["port"], limits=limits, log_level="warning")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(json.loads(sys.argv[1])))
    except EXPECTED as error:
        print(one_line(error), file=sys.stderr)
        sys.exit(2)
