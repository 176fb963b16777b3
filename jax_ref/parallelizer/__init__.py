"""Decoders of several Hugging Face families on one device, and their training."""

from jax_ref.parallelizer.reference import ACTIVATE as ACTIVATE
from jax_ref.parallelizer.reference import ACTIVATIONS as ACTIVATIONS
from jax_ref.parallelizer.reference import EMBEDDING as EMBEDDING
from jax_ref.parallelizer.reference import FAMILIES as FAMILIES
from jax_ref.parallelizer.reference import HEAD as HEAD
from jax_ref.parallelizer.reference import Arrays as Arrays
from jax_ref.parallelizer.reference import Attention as Attention
from jax_ref.parallelizer.reference import Batch as Batch
from jax_ref.parallelizer.reference import Decoder as Decoder
from jax_ref.parallelizer.reference import DecoderLayer as DecoderLayer
from jax_ref.parallelizer.reference import DecoderTraits as DecoderTraits
from jax_ref.parallelizer.reference import Embedding as Embedding
from jax_ref.parallelizer.reference import GatedMLP as GatedMLP
from jax_ref.parallelizer.reference import Linear as Linear
from jax_ref.parallelizer.reference import RMSNorm as RMSNorm
from jax_ref.parallelizer.reference import Step as Step
from jax_ref.parallelizer.reference import Trained as Trained
from jax_ref.parallelizer.reference import Trunk as Trunk
from jax_ref.parallelizer.reference import by_name as by_name
from jax_ref.parallelizer.reference import compiled_step as compiled_step
from jax_ref.parallelizer.reference import from_state_dict as from_state_dict
from jax_ref.parallelizer.reference import lora_weight as lora_weight
from jax_ref.parallelizer.reference import mean_loss as mean_loss
from jax_ref.parallelizer.reference import rotated as rotated
from jax_ref.parallelizer.reference import step as step
from jax_ref.parallelizer.reference import train as train
