"""Calls on the stream transport: which frame may come when, and what it means. Pure.

A connection carries calls. The client opens them with CALL frames; each gets exactly one STATUS,
and STATUSes come in the order of the CALLs. No frame names its call, so both ends count:

**What a client sends belongs to the newest call**, the one whose CALL it sent last. For a method
whose client streams, MESSAGE and CONTENT follow the CALL until END. A call *is sent* when its
END or ABORT was sent, or its STATUS was received; a call of any other method is sent with its
CALL. Only then may the next CALL follow. ABORT may come for the newest call at any time, also
after END; older calls can't be aborted, so whoever may want to stop a call early opens no other
behind it.

**What a server sends belongs to the oldest open call**, the oldest without STATUS. Every call
gets its STATUS, also one that was aborted: this keeps both ends in step.

**Frames cross.** A server may send STATUS before it has read the whole call (an append refused
at once). The client, which doesn't know yet, goes on sending MESSAGE and CONTENT, and may end
with END or ABORT: the server drops these, up to the next CALL. When the STATUS arrives, the
client stops sending: neither END nor ABORT is needed any more. So a server that sees a CALL
while the newest call is neither sent nor answered sees a client that is out of step: it ends the
connection. An ABORT that crosses the STATUS of a call already sent is dropped, too.

**Pipelining.** Up to 64 calls may be open. A client's count is never less than its server's, so
a client that keeps the bound is never refused; the server holds back a 65th CALL, and with it
everything after, until a STATUS makes room (``ServerCalls.full``).

**After success.** A call whose head says ``after_success`` is run only if the call before it on
the connection ended with success; the first call has none before it, and runs. What success is,
the service says when it ends a call: for an append, that the journal took it, which is more than
the code 0. A call that isn't run for this reason ends with the code ABORTED, and isn't a success
itself, so that a chain of such calls stops at its first failure.

**Leaving.** After GOAWAY neither end opens new calls; those already begun go on. A CALL that
crosses the server's GOAWAY is answered with UNAVAILABLE. The client closes the connection when
its last call has ended; a server without open calls waits for that, for a bounded time.

**Not run.** A STATUS whose kind is :data:`NOT_RUN` says that the service never received the call:
its method is unknown here, it came after GOAWAY, or it followed a failure. It can be repeated
without the risk that it runs twice.

**Rules broken.** The end that receives a frame out of order raises
:class:`~gazette_sdk.errors.StreamProtocolError`, for this frame and every later one. The
connection ends then, with a GOAWAY that gives the reason. The methods for sending raise the same
error for a frame that the peer would refuse; the connection stays usable.

Each end is a table of (state, kind of frame) → (effect, next state):

- ``events``: events that the state machines make of the frames they receive.
- ``calls``: what both ends have.
- ``server``: :class:`ServerCalls`.
- ``client``: :class:`ClientCalls`.
"""
