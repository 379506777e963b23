"""The elastic agent: torch.distributed.elastic's own, configured and given kdist's rules of
failing, joining and stopping.
"""
