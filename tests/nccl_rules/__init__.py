"""NCCL's rules of order, checked on CPUs: programs recorded from gloo runs and replayed by NCCL's queues."""
