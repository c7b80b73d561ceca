"""One short file per transformer class: its token layout, and tiny inputs to check the layout with."""
