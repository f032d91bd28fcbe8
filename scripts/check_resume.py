"""Kill a training run at random moments and compare what it comes to with a run left in peace.

    python scripts/check_resume.py                 # 20 kills, one process
    python scripts/check_resume.py --processes 2   # the same, two processes of two devices each

With two processes also: the death of one must end the other, and a run begun on a 2x2 mesh must go
on on a 4x1 mesh. Prints one line a check; exit code 1 if one fails.
"""

import argparse
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

STEPS = 300
PEER_DEADLINE = 60.0

CONFIG = """
name: resume-check
output_dir: {output}
model:
  {{hidden_size: 32, intermediate_size: 64, num_layers: 2, num_heads: 4, num_kv_heads: 2}}
data: {{source: {corpus}, sequence_length: 64, batch_size: 8, validation_fraction: 0.1}}
optimizer: {{learning_rate: 0.001, warmup_steps: 10}}
mesh: {{data: {data}, fsdp: {fsdp}}}
training:
  {{steps: {steps}, eval_every: 50, eval_batches: 2, checkpoint_every: 10, log_every: 1}}
sample: null
distributed: {{peer_timeout: 20}}
"""


class Run:
    """A training run in a directory, started and killed as its own process or processes."""

    def __init__(self, directory: Path, corpus: Path, processes: int):
        self.directory, self.corpus, self.count = directory, corpus, processes
        self.processes: list[subprocess.Popen] = []
        directory.mkdir(parents=True)

    def start(
        self, *, data: int | None = None, fsdp: int | None = None, steps: int = STEPS
    ) -> None:
        config = self.directory / "config.yaml"
        half = self.count
        config.write_text(
            CONFIG.format(
                output=self.directory / "run",
                corpus=self.corpus,
                data=data or half,
                fsdp=fsdp or half,
                steps=steps,
            )
        )
        environment = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={self.count}",
        }
        address = f"127.0.0.1:{_free_port()}"
        self.processes = []
        for index in range(self.count):
            if self.count > 1:
                environment["JAX_COORDINATOR_ADDRESS"] = address
                environment["JAX_NUM_PROCESSES"] = str(self.count)
                environment["JAX_PROCESS_ID"] = str(index)
            log = (self.directory / f"log-{index}.txt").open("a")
            self.processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "jaxlab.cli.main", "train", str(config)],
                    env=environment,
                    stdout=log,
                    stderr=log,
                )
            )
            log.close()

    def records(self) -> list[dict]:
        path = self.directory / "run" / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        records = []
        for line in lines:
            try:
                records.append(json.loads(line))
            except json.JSONDecodeError:  # being written
                break
        return records

    def wait_for_step_after(self, known: int, timeout: float = 180) -> int:
        """Return the last step once it is another than `known`."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            records = self.records()
            last = records[-1]["step"] if records else 0
            if last != known or any(process.poll() is not None for process in self.processes):
                return last
            time.sleep(0.01)
        raise TimeoutError(f"no step after {known}: see {self.directory}/log-0.txt")

    def kill(self, which: slice = slice(None)) -> None:
        for process in self.processes[which]:
            process.send_signal(signal.SIGKILL)
        for process in self.processes[which]:
            process.wait()

    def finish(self, timeout: float = 600) -> None:
        for process in self.processes:
            if process.wait(timeout) != 0:
                raise RuntimeError(f"the run failed: see {self.directory}/log-0.txt")

    def parameters(self) -> dict[str, np.ndarray]:
        from safetensors.numpy import load_file

        return load_file(self.directory / "run" / "model" / "model.safetensors")

    def losses(self) -> list[tuple]:
        names = ("step", "loss", "grad_norm", "validation_loss")
        return [tuple(record.get(name) for name in names) for record in self.records()]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def check_kills(root: Path, corpus: Path, processes: int, kills: int, seed: int) -> bool:
    peaceful = Run(root / "peaceful", corpus, processes)
    begun = time.monotonic()
    peaceful.start()
    peaceful.wait_for_step_after(0)
    first = time.monotonic()
    peaceful.finish()
    # Time to train, without start-up; a kill must not let the run come to its end.
    span = (time.monotonic() - first) / (kills + 1)
    print(f"uninterrupted: {time.monotonic() - begun:.1f} s, {STEPS} steps", flush=True)

    rng = random.Random(seed)
    killed = Run(root / "killed", corpus, processes)
    done, steps = 0, []
    while done < kills:
        records = killed.records()
        killed.start()
        # Most kills fall into training; some into start-up, restoring or compiling.
        if rng.random() < 0.8:
            killed.wait_for_step_after(records[-1]["step"] if records else 0)
            time.sleep(rng.uniform(0, 2 * span))
        else:
            time.sleep(rng.uniform(0, 8))
        if all(process.poll() is not None for process in killed.processes):
            break  # finished before it could be killed
        killed.kill()
        done += 1
        records = killed.records()
        steps.append(records[-1]["step"] if records else 0)
    print(f"killed {done} times, at steps {steps}", flush=True)
    killed.start()
    killed.finish()
    want, got = peaceful.parameters(), killed.parameters()
    same = want.keys() == got.keys() and all(
        want[name].tobytes() == got[name].tobytes() for name in want
    )
    same_losses = peaceful.losses() == killed.losses()
    print(f"{'ok' if same else 'FAILED'}: final parameters are bit-identical")
    print(f"{'ok' if same_losses else 'FAILED'}: metrics.jsonl tells the same losses, once each")
    return same and same_losses and done >= min(kills, 3)


def check_peer_death(root: Path, corpus: Path) -> bool:
    passed = True
    for victim in (1, 0):
        run = Run(root / f"peer-{victim}", corpus, 2)
        run.start(steps=100_000)
        run.wait_for_step_after(0)
        time.sleep(1)
        run.kill(slice(victim, victim + 1))
        begun = time.monotonic()
        survivor = run.processes[1 - victim]
        try:
            code = survivor.wait(PEER_DEADLINE)
        except subprocess.TimeoutExpired:
            survivor.kill()
            print(f"FAILED: process {1 - victim} still runs {PEER_DEADLINE:.0f} s after the other")
            passed = False
            continue
        took = time.monotonic() - begun
        message = (run.directory / f"log-{1 - victim}.txt").read_text().strip().splitlines()
        # An error where one could be raised; else the runtime has aborted the process.
        signs = ("error: lost one of the 2", f"error: process {1 - victim} of 2 was")
        clear = [line for line in message if line.startswith(signs)]
        good = code != 0 and bool(clear)
        passed &= good
        print(
            f"{'ok' if good else 'FAILED'}: process {victim} killed, the other ended after "
            f"{took:.1f} s with code {code}: {(clear or message)[-1][:200]}",
            flush=True,
        )
    return passed


def check_reshape(root: Path, corpus: Path) -> bool:
    """40 steps on 2x2, against 20 on 2x2 and 20 more on 4x1."""
    whole = Run(root / "whole", corpus, 2)
    whole.start(steps=40)
    whole.finish()
    moved = Run(root / "moved", corpus, 2)
    moved.start(steps=40)
    moved.wait_for_step_after(0)
    while not (moved.records() and moved.records()[-1]["step"] >= 12):
        time.sleep(0.005)
    moved.kill()
    at = moved.records()[-1]["step"]
    moved.start(steps=40, data=4, fsdp=1)
    moved.finish()
    want, got = whole.parameters(), moved.parameters()
    difference = max(float(np.abs(want[name] - got[name]).max()) for name in want)
    passed = difference <= 1e-6
    print(
        f"{'ok' if passed else 'FAILED'}: killed at step {at} of 40 on 2x2, resumed on 4x1: "
        f"parameters differ by at most {difference:.1e}"
    )
    return passed


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--processes", type=int, choices=(1, 2), default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=("kills", "peer", "reshape"))
    parser.add_argument("--directory", type=Path, help="keep everything here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        root = options.directory or Path(temporary)
        root.mkdir(parents=True, exist_ok=True)
        corpus = root / "corpus.txt"
        lines = [f"{i} bottles hang on the wall, and {i * 7 % 31} fall. " * 8 for i in range(400)]
        corpus.write_text("\n\n".join(lines))
        passed = True
        if options.only in (None, "kills"):
            passed &= check_kills(root, corpus, options.processes, options.kills, options.seed)
        if options.processes == 2 and options.only in (None, "peer"):
            passed &= check_peer_death(root, corpus)
        if options.processes == 2 and options.only in (None, "reshape"):
            passed &= check_reshape(root, corpus)
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    main()
