"""The process of one check: `python -m hybrid3d.doctor.gpu.child MODULE:FUNCTION ARGUMENTS RECORD`."""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from pathlib import Path

from hybrid3d.doctor.gpu.check import CheckFailed, CheckLog, CheckSkipped
from hybrid3d.errors import set_stream_errors


def main(function: str, arguments: str, record_path: str) -> None:
    """Run a check; write its numbers and how it ended to the record, everything else to the output.

    Args:
        function: `module:function`.
        arguments: its keyword arguments, as JSON.
    """
    module, _, name = function.partition(":")
    with Path(record_path).open("a", encoding="utf-8") as file:
        record = CheckLog(file)
        try:
            getattr(importlib.import_module(module), name)(record, **json.loads(arguments))
        except CheckSkipped as error:
            record.end("skipped", str(error))
        except CheckFailed as error:
            record.end("failed", str(error))
        except BaseException as error:  # the boundary of the process: whatever ends a check is reported
            traceback.print_exc()
            lines = str(error).strip().splitlines() or [""]
            record.end("failed", f"{type(error).__name__}: {lines[0]}")
        else:
            record.end("passed")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # the threads of a failed check's process groups would wait for each other


if __name__ == "__main__":
    set_stream_errors()
    main(*sys.argv[1:])
