"""The `jaxlab` command: parse, call, show. The only part of jaxlab that prints."""
