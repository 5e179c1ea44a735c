"""The cluster of document 000: one parameter server and two workers on this machine.

Its other sections, to be written instead of these two lines (7 and 8 are two machines, server1 and server2):

    1        ps_svrs = ['localhost:2223']                       worker_svrs = ['localhost:2222']
    2, 3, 4  ps_svrs = ['localhost:2223']                       worker_svrs = ['localhost:2222', 'localhost:2221']
    5, 6     ps_svrs = ['localhost:2223', 'localhost:2224']     worker_svrs = ['localhost:2222', 'localhost:2221']
    7        ps_svrs = ['server1:2224']                         worker_svrs = ['server1:2222', 'server2:2222']
    8        ps_svrs = ['server1:2224']     worker_svrs = ['server1:2222', 'server1:2223', 'server2:2222']
"""

ps_svrs = ["localhost:2223"]
worker_svrs = ["localhost:2222", "localhost:2221"]
