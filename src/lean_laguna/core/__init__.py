"""The words of the system: configuration, request types, errors, environment, provenance; standard library only."""
