# /// script
# requires-python = ">=3.9"
# dependencies = []
# ///
"""Minimize a parabola without any package, as a script that names its own requirements."""

import argparse
import time


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    x = 2.0
    for step in range(arguments.steps):
        print(f"step {step} loss {x * x:.6f} clock={time.time():.3f}")
        x -= 2 * arguments.lr * x
        time.sleep(0.15)


if __name__ == "__main__":
    main()
