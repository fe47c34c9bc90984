"""Collectives that are compared across ranks before they are launched, and what becomes of the group when they differ."""

import functools
import logging

from ncclpy.core.wait cimport deadline_after
from ncclpy.engine.callbacks cimport users
from ncclpy.engine.recorder cimport where_called
from ncclpy.process_group.agreement cimport Agreement

from ncclpy.core.errors import NcclError
from ncclpy.engine.launcher import abort_aside
from ncclpy.engine.recorder import text_of

_log = logging.getLogger("ncclpy.process_group")


cdef int agree(Lifecycle group, Agreement agreement, Connection connection, Request request) except -1:
    wanted = group._wanted()
    try:
        agreement.begin(deadline_after(request.limit), wanted)
    except NcclError:
        group.check_usable()
        raise
    try:
        try:
            group.check_usable()
            if request.epoch != group.number:
                group.refuse_old()
            request.work.entry.group, request.work.entry.sequence = group.number, group.collectives
            request.work.entry.note(group.ledger.ledger)  # what it waits in
            agreement.agree(group.collectives, request.brought, request.limit, wanted)
        except NcclError as error:
            if request.epoch != group.number:
                group.refuse_old()
            if group.is_ended():
                if error is not agreement.found:
                    group.check_usable()  # says what has ended it
                error.ranks = getattr(group.failure, "ranks", None)
                raise
            group.collectives += 1  # on all ranks
            error._where_called = where_called(request.work.entry)
            _disagreed(group, connection, error)
            raise
        except BaseException as error:
            if request.epoch == group.number and not group.is_ended():  # the others would wait for what this rank does not begin
                group.abort(f"the wait for the other ranks' part of collective {group.collectives} was left with "
                            f"{type(error).__name__}")
            raise
    except BaseException:
        agreement.end()
        raise
    return 0


cdef int _disagreed(Lifecycle group, Connection connection, error) except -1:
    """Do as `on_error` says."""
    cdef Agreement agreement = group.agreement
    cdef bint told = error is agreement.found
    # Where one has gone on its operation stays on the device, for good; where not all have come, nobody knows what they do.
    if group.on_error != "report" or (told and agreement.ends):
        group._fail(error, text_of(error), connection.epoch, asks=True, says=not told)  # its text tells what all bring
        return 0
    group._explain(error, functools.partial(group.notices.inquire_at, f"check/{group.collectives - 1}"), says=not told)
    if not told:
        abort_aside(connection.abort(error), text_of(error))
    users.give(functools.partial(  # a logger's handlers are the user's
        _log.error, "rank %d of process group %r goes on, as on_error='report' says, after: %s", group.rank, group.name,
        text_of(error),
    ))
    return 0
