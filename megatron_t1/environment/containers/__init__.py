"""Sandboxes that a container engine keeps: Podman and Docker through one class, Apptainer for clusters."""
