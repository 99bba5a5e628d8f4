"""How long a collection of garbage takes at a log line, with and without what the first step and the first evaluation
made being kept out of it.

    python benchmarks/garbage.py --demo --compile --num-steps 6 --log-interval 1 --eval-interval 3

Flags are those of train_fsdp.py, on one rank. Each of the two runs in a process of its own, the compiler's caches warm
or not for both alike after the first; prints one line for each collection of a run and its objects.
"""

import gc
import pathlib
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))


def run(kept_later: bool, argv: list[str]) -> None:
    """The program; before each log line, what a collection there takes."""
    import train_fsdp
    from harness.flags.parser import parse_args
    from harness.report import log as of_report

    write, keep = of_report.Log.write, of_report.keep_objects
    calls = []

    def keep_objects() -> None:
        calls.append(1)
        if kept_later or len(calls) == 1:
            keep()

    def timed_write(log, metrics, *more) -> None:
        gc.collect()  # what the step left, so that both times are those of looking alone
        objects, start = len(gc.get_objects()), time.perf_counter()
        gc.collect()
        milliseconds = 1000 * (time.perf_counter() - start)
        print(f"step {metrics['step']}: {milliseconds:.1f} ms over {objects:,} objects", file=sys.stderr, flush=True)
        write(log, metrics, *more)

    of_report.keep_objects, of_report.Log.write = keep_objects, timed_write
    train_fsdp.main(parse_args(argv))


if __name__ == "__main__":
    if sys.argv[1] in ("once", "again"):
        run(sys.argv[1] == "again", sys.argv[2:])
    else:
        for kind, meaning in (("once", "kept before the first step"), ("again", "and after it, and after evaluation")):
            print(meaning, flush=True)
            with tempfile.TemporaryDirectory() as folder:
                command = [sys.executable, __file__, kind, *sys.argv[1:], "--output-dir", folder]
                subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
