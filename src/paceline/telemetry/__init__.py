"""WHAT is recorded? Printed lines, telemetry records and how they are read, the summary, TensorBoard."""
