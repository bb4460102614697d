"""``gazctl journals fragments``."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from gazette_sdk.cli.client import open_broker
from gazette_sdk.cli.command import Invocation
from gazette_sdk.cli.concurrency import for_each
from gazette_sdk.cli.formats import age, fragment_json, iec_bytes, proto_text, write_table
from gazette_sdk.cli.journals.selection import select, selection_of
from gazette_sdk.cli.journals.settings import FRAGMENTS, FragmentsSettings
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.durations import from_seconds
from gazette_sdk.protocol.fragments import digest_of, length_of
from gazette_sdk.transport.base import Transport
from gazette_sdk.transport.listing import list_all_fragments

__all__ = ["fragments_of", "run", "stored_of"]

_SUM_DIGITS = 12


async def run(invocation: Invocation) -> None:
    """List the fragments of journals."""
    settings = invocation.settings(FRAGMENTS)
    selection = selection_of(invocation, settings, is_required=False)
    template = pb.FragmentsRequest(begin_mod_time=settings.from_time, end_mod_time=settings.to_time)
    if settings.url_ttl_s > 0:
        template.signatureTTL.CopyFrom(from_seconds(settings.url_ttl_s))
    async with open_broker(invocation) as transport:
        journals = await select(transport, selection)
        responses = await fragments_of(transport, journals, template)
    show(responses, settings)


async def fragments_of(
    transport: Transport, journals: list[pb.ListResponse.Journal], template: pb.FragmentsRequest
) -> list[pb.FragmentsResponse]:
    """Return all fragments of journals, in their order.

    Args:
        transport: transport to the journals.
        journals: the journals.
        template: request of each journal, without its name.

    Raises:
        GazetteError: the first listing that failed.
    """

    async def fragments(journal: pb.ListResponse.Journal) -> pb.FragmentsResponse:
        request = pb.FragmentsRequest()
        request.CopyFrom(template)
        request.journal = journal.spec.name
        return await list_all_fragments(transport, request)

    return await for_each(journals, fragments)


async def stored_of(transport: Transport, journal: pb.ListResponse.Journal) -> pb.FragmentsResponse:
    """Return a journal's fragments, and the stored objects that have the name of one only.

    No reader gets these, and a retention removes them, too. Brokers that do not know the request
    answer with the fragments again.

    Raises:
        GazetteError: they could not be listed.
    """
    (response,) = await fragments_of(transport, [journal], pb.FragmentsRequest())
    (torn,) = await fragments_of(transport, [journal], pb.FragmentsRequest(torn_only=True))
    known = {each.spec.SerializeToString() for each in response.fragments}
    response.fragments.extend(
        each for each in torn.fragments if each.spec.SerializeToString() not in known
    )
    return response


def show(responses: list[pb.FragmentsResponse], settings: FragmentsSettings) -> None:
    """Write fragments to standard output."""
    match settings.format:
        case "table":
            headers = ["Journal", "Offset", "Length", "Persisted", "SHA1", "Compression"]
            has_urls = settings.url_ttl_s > 0
            write_table([*headers, "URL"] if has_urls else headers, _rows(responses, has_urls))
        case "json":
            for response in responses:
                for fragment in response.fragments:
                    sys.stdout.write(fragment_json(fragment).decode() + "\n")
        case "proto":
            for response in responses:
                sys.stdout.write(proto_text(response))


def _rows(responses: list[pb.FragmentsResponse], has_urls: bool) -> Iterator[list[str]]:  # noqa: FBT001
    for response in responses:
        for fragment in response.fragments:
            spec = fragment.spec
            row = [
                spec.journal,
                str(spec.begin),
                iec_bytes(length_of(spec)),
                age(spec.mod_time) if spec.mod_time else "",
                digest_of(spec.sum).hex()[:_SUM_DIGITS] + "...",
                pb.CompressionCodec.Name(spec.compression_codec),
            ]
            yield [*row, fragment.signed_url] if has_urls else row
