"""`python -m infinilm` is the `infinilm` command."""

from infinilm.cli.main import main

if __name__ == "__main__":
    main()
