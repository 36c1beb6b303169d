// Numbers as people read them.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

export function bytes(count: number): string {
  let unit = 0;
  let value = count;
  while (value >= 1024 && unit < UNITS.length - 1) {
    value /= 1024;
    unit += 1;
  }
  const digits = unit === 0 ? 0 : value < 10 ? 2 : value < 100 ? 1 : 0;
  return `${value.toFixed(digits)} ${UNITS[unit]}`;
}

/** A number of bytes above a limit, so that the two never read the same. */
export function bytesOver(value: number, limit: number): string {
  const text = bytes(value);
  return text === bytes(limit) ? `more than ${text}` : text;
}

export function count(value: number): string {
  return value.toLocaleString("en");
}

export function tokens(value: number): string {
  return `${count(value)} ${value === 1 ? "token" : "tokens"}`;
}

export function seconds(value: number): string {
  if (value < 10) return `${value.toFixed(1)} s`;
  if (value < 60) return `${Math.round(value)} s`;
  const whole = Math.round(value);
  const rest = whole % 60;
  return `${Math.floor(whole / 60)} min${rest ? ` ${rest} s` : ""}`;
}
