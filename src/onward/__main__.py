"""`python -m onward`: the command line, also where the `onward` script is not on the path."""

from onward.cli import main

if __name__ == "__main__":
    main()
