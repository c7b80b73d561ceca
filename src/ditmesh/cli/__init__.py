"""The ``ditmesh`` command: one thin module for each subcommand."""
