"""Entry point of the command line. It imports little, so that Ctrl-C during other imports prints no traceback."""

import sys


def main() -> None:
    """Run the command line."""
    try:
        from vitrail.cli import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
