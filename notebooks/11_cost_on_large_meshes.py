# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # What an exchange costs on eight and on eight thousand ranks
#
# A scheme declares what it sends, and the ledger proves that on a few ranks. The same formulas, on a mesh of any size
# and a model of hosts and links, say which way is cheapest where. No GPU ran for this: seconds are those of the model,
# bytes are those of the formulas.

# %%
# %matplotlib inline
import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: one thread for each rank

from dataclasses import replace

import matplotlib.pyplot as plt

from shardproof import colours
from shardproof.cost import sheet, table
from shardproof.cost.candidates import Setting
from shardproof.cost.exchanges import compared
from shardproof.cost.figure import figure

H100, B200 = sheet.read("h100"), sheet.read("b200")
WORLDS = [8 << step for step in range(11)]
HEADS = {"h": 128, "g": 8}  # query heads, and KV heads that they share

# %% [markdown]
# ## One mesh, each op
#
# 64 ranks of cp, 8 of tp inside each host: every message of cp goes between hosts. A rank of tp has 16 of 128 heads.

# %%
setting = Setting({"cp": 64, "tp": 8}, {"s": 131072, "h": 16, "g": 1}, H100)
print(table.one_mesh(compared("attention", setting)))

# %% [markdown]
# ## Attention from 8 to 8,192 ranks
#
# One sequence of two million tokens over more and more ranks. Ulysses ends where the heads do; USP goes on, with a ring
# of groups that exchange heads. `step` hides messages behind products, `communication` hides nothing.


# %%
def over(name, axis, worlds, names, links=H100, **inner):
    """A comparison for each number of ranks."""
    return [compared(name, Setting({axis: world, **inner}, names, links)) for world in worlds]


attention = over("attention", "cp", WORLDS, {"s": 2**21, **HEADS})
display(figure(attention, "attention over cp, 2,097,152 tokens, h100"))

# %% [markdown]
# ## Where the ring stops being free
#
# As ranks are added products of a rank fall, what its ring sends does not, and its messages are more. The colour of a
# cell is the way whose step is shortest, for sequences and worlds.

# %%
LENGTHS = [2**power for power in range(17, 25)]
WAYS = ("ring", "all_gather", "ulysses", "usp")


def winners(links):
    """The number of the best way for each length (rows) and world (columns); -1 where a layout cannot shard it."""
    cells = []
    for length in LENGTHS:
        row = over("attention", "cp", WORLDS[::2], {"s": length, **HEADS}, links)
        cells.append([WAYS.index(one.least.label.partition(" ")[0]) if one.least else -1 for one in row])
    return cells


canvas, panels = plt.subplots(1, 2, figsize=(9, 3.4), sharey=True, layout="constrained")
for panel, links in zip(panels, (H100, B200), strict=True):
    best = winners(links)
    words = [[WAYS[way] if way >= 0 else "" for way in row] for row in best]
    colours.tiles(panel, best, len(WAYS), text=words, title=links.name, xlabel="ranks of cp")
    panel.set_xticks(range(len(WORLDS[::2])), WORLDS[::2])
    panel.set_yticks(range(len(LENGTHS)), [f"{length:,}" for length in LENGTHS])
panels[0].set_ylabel("tokens")
plt.show()

# %% [markdown]
# ## Hidden states or states
#
# A Mamba mixer over cp either exchanges heads for tokens, or passes states on. The first sends less as ranks have fewer
# tokens, the second as much as before.

# %%
mixers = over("mamba", "cp", [8 << step for step in range(8)], {"t": 2**16, "h": 128})
print(table.several_meshes(mixers))

# %%
display(figure(mixers, "a Mamba mixer over cp, 65,536 tokens, h100"))

# %% [markdown]
# ## Slower links
#
# The same with adapters of a tenth of the bandwidth: what crosses hosts decides earlier.

# %%
slow = replace(H100, name="slow", between_bytes_per_second=H100.between_bytes_per_second / 10)
for links in (H100, slow):
    least = [one.least.label for one in over("attention", "cp", WORLDS[::2], {"s": 2**21, **HEADS}, links)]
    print(f"{links.name:5}", *(f"cp={world}: {label:14}" for world, label in zip(WORLDS[::2], least, strict=True)))

# %% [markdown]
# ## Your turn
#
# 1. One sequence of two million tokens on more and more ranks: how do the bytes that a rank of the ring sends change,
#    and how do its products? On how many ranks do the messages of forward take longer than the products?
# 2. In the setting of 64 ranks of cp and 8 of tp, USP exchanges heads of 2 ranks. How many times as fast must links
#    between hosts be for the ring to have the shortest step?
#
# The next cell has the answers.

# %%
rings = [next(way for way in one.candidates if way.label == "ring") for one in attention]
sends = [sum(line.size for line in way.lines if line.op == "send") for way in rings]
products = [way.product_seconds["forward"] for way in rings]
slower = [way.communication("forward") > seconds for way, seconds in zip(rings, products, strict=True)]
fewer = round(products[0] / products[-1])
print(f"1. from 8 ranks to 8,192: {sends[-1] / sends[0]:.2f} times the bytes, 1/{fewer:,} of the time of products")
print(f"   messages take longer than products from {WORLDS[slower.index(True)]:,} ranks on")
assert slower == sorted(slower)

for tenths in range(10, 30):
    faster = replace(H100, between_bytes_per_second=tenths / 10 * H100.between_bytes_per_second)
    least = compared("attention", replace(setting, sheet=faster)).least
    if least.label == "ring":
        break
print(f"2. {least.label} from {tenths / 10} times the bandwidth on, in {1e3 * least.seconds:.2f} ms")
