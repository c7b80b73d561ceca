"""Reports: the output of a command or a tool as data, with writers for JSON, terminals and HTML."""
