"""The entry point. It imports little, so that Ctrl-C during the other imports gives no traceback."""

import sys


def main() -> None:
    try:
        from vitrail.cli import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
