"""``python -m ditmesh``: the same as the ``ditmesh`` command."""

from .cli.main import main

if __name__ == "__main__":
    main()
