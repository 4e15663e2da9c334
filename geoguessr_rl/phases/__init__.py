"""One module a command; phases talk to each other through files."""
