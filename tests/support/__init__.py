"""Workloads, faults and oracles that several tests share."""
