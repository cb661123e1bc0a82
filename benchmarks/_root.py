"""Lets a script import what benchmarks share with tests: `import _root` before `tests`."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))
