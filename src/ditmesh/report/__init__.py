"""Reports: the output of a command as data, with writers for JSON and terminals."""
