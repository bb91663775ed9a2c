"""`python -m graphmoe`: the same as the `graphmoe` command."""

from graphmoe.cli import main

if __name__ == "__main__":
    main()
