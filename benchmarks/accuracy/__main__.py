"""python -m benchmarks.accuracy PART [options]: are the verdicts right?"""

import importlib
import sys

PARTS = ("batch-sizes", "gpu", "memory", "predictions", "short-runs", "stalls")

if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in PARTS:
        sys.exit(f"say which: python -m benchmarks.accuracy {{{','.join(PARTS)}}} [options]")
    importlib.import_module(f"benchmarks.accuracy.{sys.argv.pop(1).replace('-', '_')}").main()
