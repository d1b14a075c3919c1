"""Tensor parallelism's path on a GPU: collectives of an NCCL group, here of one rank, inside captured graphs."""



