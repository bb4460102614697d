"""Appends at their primary (broker sections 5, 8 and 9).

- `machine`, `inputs`: the append state machine, and its inputs derived from facts; pure.
- `append`: the driver of the machine, from the request to the response.
- `common_case`: small appends at hand, in one synchronous function; it declines all others.
- `content`, `flow_control`: content from the client, and its rates.
- `store_health`, `assignments`: the first precondition; routes and suspensions in Etcd.
- `proxy`, `pulse`: appends to another primary; empty appends to own journals.
"""
