// Undoes gpp/report/draw/packed.py: base64, deflate, LEB128, differences.

async function inflate(packed) {
  const raw = Uint8Array.from(atob(packed), (char) => char.charCodeAt(0));
  const stream = new Blob([raw]).stream().pipeThrough(new DecompressionStream("deflate-raw"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

function reader(stream) {
  let at = 0;
  const next = () => {
    let value = 0, scale = 1, byte;
    do {
      byte = stream[at++];
      value += (byte & 0x7f) * scale;
      scale *= 128;
    } while (byte & 0x80);
    return value;
  };
  const column = (count) => Float64Array.from({ length: count }, next);
  const summed = (count, of = (value) => value) => {
    let sum = 0;
    return Float64Array.from({ length: count }, () => (sum += of(next())));
  };
  return { next, column, summed };
}

const unzigzag = (value) => (value % 2 ? -(value + 1) / 2 : value / 2);

// Rows of events: columns start and length (ticks), code (entry of the panel's table), microbatch.
async function unpackEvents(panel, numRows) {
  const { next, column, summed } = reader(await inflate(panel.packed));
  return Array.from({ length: numRows }, () => {
    const count = next();
    return { count, start: summed(count), length: column(count), code: column(count), microbatch: summed(count, unzigzag) };
  });
}

// Rows of levels: columns start (ticks) and code (entry of the table: bytes always, in flight, during a pass).
async function unpackLevels(memory) {
  const { next, column, summed } = reader(await inflate(memory.packed));
  return memory.rows.map(() => {
    const count = next();
    return { count, start: summed(count), code: column(count) };
  });
}
