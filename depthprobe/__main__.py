"""`python -m depthprobe`."""

from depthprobe.cli import main

if __name__ == "__main__":
    main()
