"""`python -m pagewire` is the `pagewire` command."""

from pagewire_frontend.cli import main

if __name__ == "__main__":
    main()
