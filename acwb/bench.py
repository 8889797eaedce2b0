"""`make bench`: prints what the README and the notes quote. So far: the captured step beside the eager one."""

import subprocess
import sys
import time
from collections.abc import Callable

import acwb
from acwb.measure import interleave, peak_live_bytes, process_peak_bytes, ratio
from acwb.models import Subject
from acwb.units import gibibytes

ROUNDS = 15


def captured_beside_eager(make: Callable[..., Subject], batch_size: int) -> str:
    """One row: seconds to capture, time of a captured step as a ratio of eager's, peak of live bytes above static."""
    eager, captured = make(batch_size=batch_size), make(batch_size=batch_size)
    start = time.perf_counter()
    step = acwb.trace(captured.model, captured.batch, captured.loss_fn, captured.optimizer)
    capture_seconds = time.perf_counter() - start
    seconds = interleave({"eager": eager.eager_step, "captured": step.run}, ROUNDS)
    plain, ours = peak_live_bytes(eager.eager_step), peak_live_bytes(step.run)
    relative = ratio(seconds["captured"], seconds["eager"])
    return (
        f"{eager.name:<10}{batch_size:>6}{capture_seconds:>10.1f} s   {relative!s:<24}"
        f"{gibibytes(ours):>12}{gibibytes(plain):>12}   ×{ours / plain:.4f}"
    )


def capture_beyond_memory(batch_size: int) -> str:
    """One row: the capture of a ResNet-152 step far beyond this machine, in a process of its own."""
    code = f"from acwb import bench; bench.report_capture({batch_size})"
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def report_capture(batch_size: int) -> None:
    """Capture ResNet-152 at `batch_size` and write the seconds and this process's peak memory."""
    subject = acwb.models.resnet152(batch_size=batch_size)
    start = time.perf_counter()
    step = acwb.trace(subject.model, subject.batch, subject.loss_fn, subject.optimizer)
    seconds = time.perf_counter() - start
    peak = process_peak_bytes()
    held = sum(activation.bytes for activation in step.graph.activations)
    sys.stdout.write(
        f"resnet152 at batch {batch_size}: captured in {seconds:.1f} s, process peak {gibibytes(peak)}; "
        f"its activations alone take {gibibytes(held)}\n"
    )


def main() -> None:
    """Print the tables."""
    write = sys.stdout.write
    write("captured step beside eager (time ratio: median and 95 % interval; peak of live tensor bytes above static)\n")
    write(f"{'subject':<10}{'batch':>6}{'capture':>12}   {'time':<24}{'captured':>12}{'eager':>12}   peak\n")
    for make in (acwb.models.resnet152, acwb.models.bert):
        write(captured_beside_eager(make, 4) + "\n")
    write(capture_beyond_memory(1024) + "\n")


if __name__ == "__main__":
    main()
