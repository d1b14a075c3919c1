"""A module to run as a child process: it does what its parent tells it by a frame."""

import sys
import time

from infinilm.framing import FrameSocket
from infinilm.processes import exit_with_parent, parent_socket


def main() -> None:
    exit_with_parent()
    frames = FrameSocket(parent_socket())
    frames.send_frame(b"ready")
    command = frames.receive_frame()
    if command == b"fail":
        print("first words", file=sys.stderr)
        print("the last words", file=sys.stderr)
        raise SystemExit(3)
    time.sleep(120)


if __name__ == "__main__":
    main()
