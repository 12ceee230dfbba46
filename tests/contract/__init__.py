"""What every store promises, tried on each of them: see `storage_backends.object_store`."""
