"""What Triton raises where a kernel takes more of a card than the card has."""

from triton.runtime.errors import OutOfResources as OutOfResources
