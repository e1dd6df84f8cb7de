"""The words of the system: configuration, request types, errors, provenance; standard library only."""
