"""`python -m onward`: the command line, also where the `onward` script is not on the path."""

from onward.cli.app import app

if __name__ == "__main__":
    app(prog_name="onward")
