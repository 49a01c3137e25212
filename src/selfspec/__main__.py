"""``python -m selfspec`` is the command ``selfspec``."""

if __name__ == "__main__":  # a server's processes import the main module again
    from selfspec.cli import main

    main()
