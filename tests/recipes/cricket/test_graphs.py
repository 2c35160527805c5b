"""Graphs in batches equal graphs built one by one, and know nothing of what comes."""

import copy

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from samestep.base.trees import num_rows
from samestep.core.recipes.cricket.corpus import from_documents, merge
from samestep.core.recipes.cricket.graphs import EDGES, GraphSource, build
from samestep.core.recipes.cricket.synthetic import documents
from samestep.core.recipes.cricket.tables import CONTEXTS, Vocabularies, make_tables, vocabularies
from tests.needs import needs

pytestmark = needs("torch_geometric")


def source_of(files, horizon=5, names=None, **more):
    corpus = merge([from_documents(files)])
    every = np.arange(len(corpus.matches["date"]))
    names = names or vocabularies(corpus, every, fewest_balls=0)
    return GraphSource(make_tables(corpus, names, horizon), **more)


@pytest.fixture(scope="module")
def files():
    return list(documents(2, seed=5))


@pytest.fixture(scope="module")
def source(files):
    return source_of(files)


def node(delivery, name):
    return delivery[{"striker": "batter"}.get(name, name)]


def test_the_edges_of_a_graph_are_those_of_the_balls_so_far(files, source):
    card = msgspec.json.decode(files[0][1])
    balls = [d for over in card["innings"][0]["overs"] for d in over["deliveries"]]
    query, past = balls[40], balls[:40]
    graph = build(source, torch.tensor([40]))

    def edges(*kind):
        return set(map(tuple, graph[kind].edge_index.T.tolist()))

    def last(*keys):
        """Return for each ball the last one before it with the same players."""
        found = set()
        for k, one in enumerate(past):
            same = [j for j in range(k) if all(past[j][key] == one[key] for key in keys)]
            found |= {(same[-1], k)} if same else set()
        return found

    assert len(graph["ball"].x) == 40
    steps = {(k - step, k) for step in (1, 2, 3) for k in range(step, 40)}
    assert edges("ball", "precedes", "ball") == steps
    assert edges("ball", "same_bowler", "ball") == last("bowler")
    assert edges("ball", "same_batter", "ball") == last("batter")
    assert edges("ball", "same_matchup", "ball") == last("batter", "bowler")
    for name in ("striker", "non_striker"):
        faced = {(k, 0) for k, one in enumerate(past) if one["batter"] == node(query, name)}
        assert edges("ball", "faced_by", name) == faced
    bowled = {(k, 0) for k, one in enumerate(past) if one["bowler"] == query["bowler"]}
    assert edges("ball", "bowled_by", "bowler") == bowled
    assert edges("ball", "before", "query") == {(k, 0) for k in range(40)}
    assert edges("match", "frames", "ball") == {(0, k) for k in range(40)}


def test_distances_grow_with_the_balls_between_and_edges_left_out_are_empty(source):
    graph = build(source, torch.tensor([30]))
    far = graph["ball", "before", "query"].edge_attr.squeeze(1)
    assert torch.all(far[1:] < far[:-1])
    assert far[-1] == 0
    near = graph["ball", "precedes", "ball"]
    apart = (near.edge_index[1] - near.edge_index[0]).float()
    torch.testing.assert_close(near.edge_attr.squeeze(1), torch.log(apart) / np.log(120))
    left = GraphSource(source.tables, left_out=frozenset({"precedes", "faced_by"}))
    graph = build(left, torch.tensor([50]))
    kinds = {kind: graph[kind].edge_index.shape[1] for kind in EDGES}
    assert all((kind[1] in left.left_out) == (number == 0) for kind, number in kinds.items())


@settings(max_examples=10)
@given(data=st.data(), history=st.sampled_from([0, 7, 150]))
def test_a_batch_is_what_geometric_makes_of_single_graphs(source, data, history):
    from torch_geometric.data import Batch

    source = GraphSource(source.tables, history)
    rows = st.lists(st.integers(0, len(source.tables.target) - 1), min_size=1, max_size=6)
    chosen = data.draw(rows)
    singles = [build(source, torch.tensor([row])) for row in chosen]
    for single in singles:
        for name in single.node_types:
            del single[name].batch
        del single.num_graphs
    expected, found = Batch.from_data_list(singles), build(source, torch.tensor(chosen))
    assert num_rows(found) == len(chosen)
    for name in (*CONTEXTS, "query", "ball"):
        torch.testing.assert_close(found[name].x, expected[name].x, rtol=0, atol=0)
        torch.testing.assert_close(found[name].batch, expected[name].batch)
        if "ids" in expected[name]:
            torch.testing.assert_close(found[name].ids, expected[name].ids)
    torch.testing.assert_close(found["query"].y, expected["query"].y)
    for kind in EDGES:
        order = [np.lexsort(g[kind].edge_index.numpy()) for g in (found, expected)]
        ours, theirs = (
            g[kind].edge_index[:, o] for g, o in zip((found, expected), order, strict=True)
        )
        torch.testing.assert_close(ours, theirs)
        if "edge_attr" in expected[kind]:
            one, other = (
                g[kind].edge_attr[o] for g, o in zip((found, expected), order, strict=True)
            )
            torch.testing.assert_close(one, other)


def everything(graph):
    stores = {**{n: graph[n] for n in graph.node_types}, **{e: graph[e] for e in graph.edge_types}}
    return {
        (str(name), key): value
        for name, store in stores.items()
        for key, value in store.items()
        if key != "y"
    }


def spoil(card, number, place, draw, *, cut):
    """Change all balls of an innings from one on, and what follows it; names at the ball stay."""
    card = copy.deepcopy(card)
    side = card["innings"][number]
    balls = [(o, k) for o in side["overs"] for k in range(len(o["deliveries"]))]
    for later, (over, k) in enumerate(balls[place:]):
        one = over["deliveries"][k]
        one["runs"] = {"batter": (runs := int(draw.integers(0, 7))), "extras": 1, "total": runs + 1}
        one["extras"] = {str(draw.choice(["wides", "noballs", "byes", "legbyes", "penalty"])): 1}
        one["wickets"] = [{"kind": "bowled", "player_out": one["batter"]}]
        if later:
            one["batter"], one["bowler"] = one["non_striker"], f"New {later}"
    last, k = balls[place]
    if cut:  # the innings ends here, and the match
        del last["deliveries"][k + 1 :]
        side["overs"] = side["overs"][: side["overs"].index(last) + 1]
        del card["innings"][number + 1 :]
    side["penalty_runs"] = {"post": 5}
    side["powerplays"].append({"from": 10.1, "to": 11.6, "type": "batting"})
    return card


@settings(max_examples=25)
@given(
    seed=st.integers(0, 10**6),
    place=st.integers(0, 60),
    number=st.integers(0, 1),
    cut=st.booleans(),
)
@example(seed=38035, place=57, number=1, cut=False)  # an innings of fewer balls
def test_changing_any_ball_at_or_after_the_query_changes_no_input(seed, place, number, cut):
    ((name, file),) = documents(1, seed % 50)
    card = msgspec.json.decode(file)
    names = Vocabularies(
        players=tuple(card["info"]["registry"]["people"].values()),
        venues=(card["info"]["venue"],),
        teams=tuple(card["info"]["teams"]),
    )
    side = card["innings"][number]
    place = min(place, sum(len(over["deliveries"]) for over in side["overs"]) - 1)
    other = spoil(card, number, place, np.random.default_rng(seed), cut=cut)
    before = sum(
        len(over["deliveries"]) for side in card["innings"][:number] for over in side["overs"]
    )
    found = [
        everything(
            build(
                source_of([(name, msgspec.json.encode(one))], names=names),
                torch.tensor([before + place]),
            )
        )
        for one in (card, other)
    ]
    assert found[0].keys() == found[1].keys()
    for key, value in found[0].items():
        assert torch.equal(value, found[1][key]), key


def test_the_balls_before_change_the_input_and_unknown_names_are_unknown(files):
    corpus = merge([from_documents(files)])
    first = vocabularies(corpus, np.array([0]), fewest_balls=10)
    assert list(first.players) == sorted(first.players)
    everyone = vocabularies(corpus, np.array([0, 1]), fewest_balls=0)
    assert len(first.players) < len(everyone.players)
    ids = make_tables(corpus, first, 5).ids
    assert ids["striker"].min() == 0
    assert ids["striker"].max() <= len(first.players)
    of = corpus.innings_of_balls()
    own = corpus.innings["match"][of] == 0
    venue = corpus.lists["venues"][corpus.matches["venue"][0]]
    assert set(ids["match"][own, 0].tolist()) == {1 + first.venues.index(venue)}
    card = msgspec.json.decode(files[0][1])
    other = spoil(card, 0, 20, np.random.default_rng(0), cut=False)
    graphs = [
        everything(build(source_of([("m.json", msgspec.json.encode(c))]), torch.tensor([21])))
        for c in (card, other)
    ]
    assert any(not torch.equal(value, graphs[1][key]) for key, value in graphs[0].items())
