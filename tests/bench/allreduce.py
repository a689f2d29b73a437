"""Time gloo's all-reduce over slow links beside the alpha-beta model of a ring.

`python tests/bench/allreduce.py` needs root, `ip` and `tc`: each process of a group has a network namespace whose link
has a limited rate. The two numbers of the model come from two processes alone. Times are the least of several: a busy
host only adds. `engine/train/distributed/SCALE.md` has the results.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

PREFIX, SUBNET, RATE, BYTES_PER_SECOND = "gpts", "10.77.0", "100mbit", 100e6 / 8
SIZES_MIB, REPEATS = (0.001, 1.0, 4.0, 25.0), 5


@contextmanager
def namespaces(count: int) -> Iterator[Sequence[str]]:
    """Yield network namespaces, each behind a link that sends at most at `RATE`."""
    names = [f"{PREFIX}{number}" for number in range(count)]
    lines = [f"ip link add {PREFIX}br type bridge", f"ip link set {PREFIX}br up"]
    for number, name in enumerate(names):
        lines += [f"ip netns add {name}", f"ip link add v{name} type veth peer name eth0 netns {name}"]
        lines += [f"ip link set v{name} master {PREFIX}br up", f"ip -n {name} link set lo up"]
        lines += [f"ip -n {name} addr add {SUBNET}.{number + 1}/24 dev eth0", f"ip -n {name} link set eth0 up"]
        lines += [f"tc -n {name} qdisc add dev eth0 root tbf rate {RATE} burst 128kb latency 400ms"]
    try:
        for line in lines:
            subprocess.run(line.split(), check=True)
        yield names
    finally:
        for line in (*(f"ip netns del {name}" for name in names), f"ip link del {PREFIX}br"):
            subprocess.run(line.split(), check=False)


def reduce_all(rank: int, size: int) -> None:
    """One process of a group: print the seconds of an all-reduce of each size."""
    import torch
    from torch import distributed

    os.environ |= {"GLOO_SOCKET_IFNAME": "eth0", "MASTER_ADDR": f"{SUBNET}.1", "MASTER_PORT": "29717"}
    distributed.init_process_group("gloo", rank=rank, world_size=size)
    least = []
    for mebibytes in SIZES_MIB:
        values, seconds = torch.ones(int(mebibytes * 2**20) // 4), []
        for _ in range(REPEATS):
            distributed.barrier()
            begin = time.perf_counter()
            distributed.all_reduce(values)
            seconds.append(time.perf_counter() - begin)
        least.append(min(seconds))
    print(json.dumps(least))


def time_group(size: int) -> list[float]:
    with namespaces(size) as names:
        command = ["ip", "netns", "exec", "", sys.executable, __file__]
        lines = [[*command[:3], name, *command[4:], str(rank), str(size)] for rank, name in enumerate(names)]
        started = [subprocess.Popen(line, stdout=subprocess.PIPE, text=True) for line in lines]
        return [*map(max, zip(*(json.loads(each.communicate()[0]) for each in started), strict=True))]


def ring_seconds(size: int, length: float, alpha: float, beta: float) -> float:
    """Return the time of a ring all-reduce (Thakur et al. 2005): 2(p - 1) steps, each with n/p bytes."""
    return 2 * (size - 1) * (alpha + length / size * beta)


def main() -> None:
    if len(sys.argv) == 3:
        reduce_all(*map(int, sys.argv[1:]))
        return
    lengths = [size * 2**20 for size in SIZES_MIB]
    two, four = time_group(2), time_group(4)
    beta = (two[-1] - two[0]) / (lengths[-1] - lengths[0])
    alpha = two[0] / 2 - lengths[0] / 2 * beta
    print(f"{RATE}: alpha {alpha * 1e6:.0f} us, beta {beta * 1e9:.1f} ns a byte (link: {1e9 / BYTES_PER_SECOND:.1f})")
    for size, times in ((2, two), (4, four)):
        for length, measured in zip(lengths, times, strict=True):
            model = ring_seconds(size, length, alpha, beta)
            error = model / measured - 1
            print(f"{size} x {length / 2**20:6.3f} MiB: {measured:.4f} s, model {model:.4f} s, {error:+.0%}")


if __name__ == "__main__":
    main()
