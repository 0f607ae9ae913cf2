"""Measuring attention on this machine: workloads, timing, reports, and the profile that negotiation reads."""
