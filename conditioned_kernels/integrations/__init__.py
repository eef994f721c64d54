"""Where a monitor's records can go, one module per library; each imports its library when it is imported itself."""
