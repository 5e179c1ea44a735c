"""The cluster of document 000: one parameter server and two workers on this machine."""

ps_svrs = ["localhost:2223"]
worker_svrs = ["localhost:2222", "localhost:2221"]
