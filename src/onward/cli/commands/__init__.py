"""One module per command of the `onward` command line; `onward.cli.app` lists them."""
