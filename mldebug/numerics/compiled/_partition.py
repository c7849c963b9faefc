"""Keeps the recorder out of Inductor's way: its reductions are put into the forward graph after the partitioner.

What is saved for backward is decided on the joint graph. Reductions there make the partitioner save more than it would
without them (1.2 GB for GPT-2 at 8 x 1024). So they are taken out of the joint graph, it is partitioned as if nobody
watched, and then each watched value gets the largest magnitude of every row, which Inductor fuses into whatever makes
the value; one op at the end records them all.

Magnitudes are compared as integers: the bits of a float without its sign order as the floats do, infinity above all
numbers and NaN above infinity. Floats would need a look at NaN for each element, and two reductions.

What is not understood is left where it was: nothing is lost by it but speed.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomPartitionerFn, get_hash_for_files

from mldebug.numerics.compiled._compiled import is_strict

_MIN_ROW = 64  # elements; a value with shorter rows is reduced as a whole
_DEVICES = ("cpu", "cuda")  # where the code that Inductor makes of this is tested
_INTEGER = {torch.float16: torch.int16, torch.bfloat16: torch.int16, torch.float32: torch.int32}
_Records = list[tuple[str, int]]  # (name of the value's node, call site), in order


class Partitioner(CustomPartitionerFn):
    """Inductor's own partitioner, on a graph without records."""

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> Any:
        from torch._functorch.compile_utils import fx_graph_cse
        from torch._functorch.partitioners import min_cut_rematerialization_partition

        # As the partitioner itself does first: afterwards a watched value is still there under its name.
        gm.graph.eliminate_dead_code()
        gm.graph = fx_graph_cse(gm.graph)
        original = _copy(gm.graph)
        outputs = kwargs["num_fwd_outputs"]
        groups = _take_out(gm.graph, outputs)
        gm.recompile()
        forward, backward = min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)
        if groups and not _put_back(forward.graph, groups, outputs):
            gm.graph = original
            gm.recompile()
            return min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)
        forward.recompile()
        return forward, backward

    def uuid(self) -> Any:
        return get_hash_for_files((__file__,))


def _take_out(graph: Any, num_forward_outputs: int) -> dict[str, _Records]:
    """Cut the records out of a joint graph; they are grouped by the node that holds `order` where they belong."""
    live = _live(graph, num_forward_outputs)
    groups: dict[str, _Records] = {}
    for node in list(graph.nodes):
        value = _recorded(node)
        if value is None or value not in live:
            continue
        before, site, (after,) = node.kwargs["_all_bases"][0], node.kwargs["site"], node.users
        after.replace_all_uses_with(before)
        graph.erase_node(after)
        graph.erase_node(node)
        groups.setdefault(before.name, []).append((value.name, site))
    graph.eliminate_dead_code()
    return groups


def _put_back(graph: Any, groups: dict[str, _Records], num_forward_outputs: int) -> bool:
    """Record the values of a forward graph at its end, group by group; False if one of them is not there."""
    nodes = {node.name: node for node in graph.nodes}
    if not all(value in nodes for records in groups.values() for value, _ in records):
        return False
    end = next(iter(reversed(graph.nodes)))
    returned = {node for node in end.args[0][:num_forward_outputs] if isinstance(node, fx.Node)}
    while end.prev.target is torch.ops.aten.copy_.default:
        end = end.prev
    rows: dict[tuple[str, bool], Any] = {}
    for name, records in groups.items():
        order = nodes[name]
        later = list(_chain(order))
        keys = [(value, is_strict(site)) for value, site in records]
        for value, strict in keys:
            if (value, strict) not in rows:
                rows[value, strict] = _rows(graph, nodes[value], strict)
        with graph.inserting_before(end):
            arguments = {
                "rows": [rows[key] for key in keys],
                "sites": [site for _, site in records],
                "values": [nodes[value] for value, _ in records if nodes[value] in returned],
                "places": [i for i, (value, _) in enumerate(records) if nodes[value] in returned],
                "_order_base_index": 0,
                "_all_bases": [order],
            }
            record = (torch.ops.mldebug.record_rows.default,)
            call = graph.call_function(torch.ops.higher_order.auto_functionalized_v2, record, arguments)
            call.meta["val"] = (None, order.meta["val"])
            after = graph.call_function(operator.getitem, (call, 1))
            after.meta["val"] = order.meta["val"]
        order.replace_all_uses_with(after, lambda user, call=call: user is not call)
        for node in later:  # whatever followed in the order of records follows still
            end.prepend(node)
    graph.lint()
    return True


def _live(graph: Any, num_forward_outputs: int) -> set[fx.Node]:
    """The nodes that the forward would have without records: what its outputs and its changes of inputs need."""
    output = next(iter(reversed(graph.nodes)))
    todo = [node for node in output.args[0][:num_forward_outputs] if isinstance(node, fx.Node)]
    todo += [node for node in graph.nodes if node.target is torch.ops.aten.copy_.default]
    live: set[Any] = set()
    while todo:
        node: Any = todo.pop()
        if node not in live:
            live.add(node)
            todo += node.kwargs["_all_bases"] if _recorded(node) is not None else node.all_input_nodes
    return live


def _recorded(node: Any) -> Any:
    """The value whose [min, max] a node records, if the node is a record and has the known form."""
    if node.target is not torch.ops.higher_order.auto_functionalized_v2 or not node.args:
        return None
    if len(node.users) != 1:
        return None
    if node.args[0] is torch.ops.mldebug.record_output.default:
        return node.kwargs["value"] if _is_known(node.kwargs["value"]) else None
    if node.args[0] is not torch.ops.mldebug.record.default:
        return None
    pair = node.kwargs["value"]
    if pair.target is not torch.ops.aten.cat.default or len(pair.args[0]) != 2:
        return None
    values = []
    for row, reduction in zip(pair.args[0], (torch.ops.aten.amin.default, torch.ops.aten.amax.default), strict=True):
        whole = row.args[0] if row.target is torch.ops.aten.unsqueeze.default else None
        if whole is None or whole.target is not reduction or len(whole.args) != 1:
            return None
        values.append(whole.args[0])
    return values[0] if values[0] is values[1] and _is_known(values[0]) else None


def _is_known(value: Any) -> bool:
    fake = value.meta.get("val")
    return isinstance(fake, torch.Tensor) and fake.dtype in _INTEGER and fake.device.type in _DEVICES


def _chain(order: Any) -> Iterator[Any]:
    """The nodes after this one that change `order`, with their results."""
    for user in list(order.users):
        if user.target is torch.ops.higher_order.auto_functionalized_v2:
            yield user
            for after in user.users:
                yield after
                yield from _chain(after)


def _rows(graph: Any, value: Any, strict: bool) -> Any:
    """Add the largest magnitude of each row of a value, right where it is made.

    The lowest number of the dtype is passed over, for masks hold it; so is -inf where it may be one (not `strict`).
    """
    aten, convert = torch.ops.aten, torch.ops.prims.convert_element_type.default
    fake = value.meta["val"]
    integer = _INTEGER[fake.dtype]
    lowest, minus_inf = (
        torch.tensor(x, dtype=fake.dtype).view(integer).item() for x in (torch.finfo(fake.dtype).min, -torch.inf)
    )
    last = fake.dim() - 1
    dims = [last] if last > 0 and isinstance(fake.shape[last], int) and fake.shape[last] >= _MIN_ROW else []
    place = value
    while place.next.op == "placeholder":
        place = place.next

    def add(op: Any, *args: Any) -> Any:
        nonlocal place
        with graph.inserting_after(place):
            place = graph.call_function(op, args)
        with fake.fake_mode:
            place.meta["val"] = op(*fx.map_arg(args, lambda node: node.meta["val"]))
        return place

    bits = add(convert, add(aten.view.dtype, value, integer), torch.int32)
    counts = add(aten.ne.Scalar, bits, lowest)
    if not strict:
        counts = add(aten.bitwise_and.Tensor, counts, add(aten.ne.Scalar, bits, minus_inf))
    magnitude = add(aten.bitwise_and.Scalar, bits, torch.iinfo(integer).max)
    largest = add(aten.amax.default, add(aten.mul.Tensor, magnitude, add(convert, counts, torch.int32)), dims)
    return add(aten.view.dtype, add(convert, largest, integer), fake.dtype)


def _copy(graph: fx.Graph) -> fx.Graph:
    new = fx.Graph()
    new.output(new.graph_copy(graph, {}))
    return new
