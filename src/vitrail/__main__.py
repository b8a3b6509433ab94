"""The entry point: small, so that Ctrl-C during the imports is an answer and not a traceback."""

import sys


def main() -> None:
    try:
        from vitrail.cli import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
