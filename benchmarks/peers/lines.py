"""A worker's side of `worker.py`: jobs and answers as lines of JSON, without any package."""

import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any


def serve(answers: Callable[[dict[str, Any]], Iterator[Any]]) -> None:
    """Writes a line of JSON for every answer to every job that comes in, and `null` after the last.

    Args:
        answers: What the worker does with a job.
    """
    # Libraries print to stdout; theirs goes to the log.
    with os.fdopen(os.dup(sys.stdout.fileno()), "w") as reply:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        for line in sys.stdin:
            for answer in answers(json.loads(line)):
                print(json.dumps(answer), file=reply, flush=True)
            print("null", file=reply, flush=True)
