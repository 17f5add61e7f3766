"""The command line: ``python -m benchmarks`` runs the demonstration, ``speed`` the timings, ``fidelity`` a table."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch

from benchmarks import demo, speed


def main() -> None:
    """Parse the command line and run what it asks for."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description="Group data attribution, measured against the original toolkits."
    )
    commands = parser.add_subparsers(dest="command", title="commands", metavar="{demo,speed,fidelity}")
    commands.add_parser("demo", help="a small end-to-end demonstration on real digits (the default)")
    timing = commands.add_parser("speed", help="time every strategy and toolkit on the same work; table and JSON")
    timing.add_argument(
        "--parts", nargs="+", choices=speed.PARTS, default=list(speed.PARTS), help="which parts to time; all by default"
    )
    timing.add_argument("--quick", action="store_true", help="smaller data: minutes instead of an hour")
    timing.add_argument("--threads", type=int, default=1, help="torch threads; 1 by default, the steadiest")
    timing.add_argument("--json", type=Path, help="where to write the rows; results/<time>-speed/speed.json by default")
    faithful = commands.add_parser("fidelity", help="Fishers and dampings of TRAK against TRAK and against retraining")
    faithful.add_argument("--data-dir", type=Path, help="folder with mnist.npz and heloc.npz; or set GGDA_DATA_DIR")
    faithful.add_argument("--quick", action="store_true", help="a smaller scale: half a minute instead of ten")
    faithful.add_argument("--json", type=Path, help="where to write the numbers; nowhere by default")
    options = parser.parse_args()
    if options.command == "speed":
        path = options.json or Path("results") / f"{time.strftime('%Y%m%d-%H%M%S')}-speed" / "speed.json"
        try:
            speed.run(options.parts, options.quick, options.threads, path)
        except KeyboardInterrupt:
            print(f"\nstopped; the rows above are in {path}")
            raise SystemExit(130) from None
    elif options.command == "fidelity":
        from benchmarks import fidelity  # needs TRAK

        torch.set_num_threads(1)
        scale = fidelity.QUICK if options.quick else fidelity.Scale()
        fidelity.run(fidelity.data_folder(options.data_dir), scale, options.json)
    else:
        demo.run()


if __name__ == "__main__":
    main()
