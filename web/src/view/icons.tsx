// Icons: paths of 24 by 24, drawn with the text's colour. A button names itself; the icon is hidden from readers.

const PATHS = {
  menu: "M4 6h16M4 12h16M4 18h16",
  plus: "M12 5v14M5 12h14",
  close: "M6 6l12 12M18 6L6 18",
  more: "M5 12h.01M12 12h.01M19 12h.01",
  send: "M12 19V5M6 11l6-6 6 6",
  stop: "M7 7h10v10H7z",
  attach: "M20 11.500l-8.200 8.200a5 5 0 0 1-7.100-7.100l8.500-8.500a3.300 3.300 0 0 1 4.700 4.700l-8.500 8.500a1.700 1.700 0 0 1-2.400-2.400l7.800-7.800",
  file: "M14 3H6v18h12V7zM14 3v4h4",
  film: "M4 5h16v14H4zM8 5v14M16 5v14M4 10h4M4 14h4M16 10h4M16 14h4",
  copy: "M9 9h11v11H9zM5 15H4V4h11v1",
  check: "M5 12.500l4.500 4.500L19 7.500",
  edit: "M4 20h4L19 9l-4-4L4 16zM13 7l4 4",
  again: "M4 12a8 8 0 0 1 14-5.300L20 9M20 4v5h-5M20 12a8 8 0 0 1-14 5.300L4 15M4 20v-5h5",
  branch: "M6 4v16M6 14c8 0 12-2 12-6M18 8V5M15 7l3-3 3 3",
  left: "M14 6l-6 6 6 6",
  right: "M10 6l6 6-6 6",
  down: "M12 5v14M6 13l6 6 6-6",
  sliders: "M4 7h9M17 7h3M4 17h3M11 17h9M15 5v4M9 15v4",
  memory: "M7 4h10v16H7zM3 8h4M3 12h4M3 16h4M17 8h4M17 12h4M17 16h4M10.500 8h3v8h-3z",
  key: "M15.500 3.500a5 5 0 1 0 0 10 5 5 0 0 0 0-10zM11.500 12L4 19.500V21h4v-2.500h2.500V16",
  sun: "M12 8a4 4 0 1 0 0 8 4 4 0 0 0 0-8zM12 2v2M12 20v2M2 12h2M20 12h2M5 5l1.500 1.500M17.500 17.500L19 19M19 5l-1.500 1.500M6.500 17.500L5 19",
  moon: "M20 14.500A8.500 8.500 0 1 1 9.500 4a7 7 0 0 0 10.500 10.500z",
  auto: "M12 3a9 9 0 1 0 0 18zM12 3a9 9 0 0 1 0 18",
  trash: "M5 7h14M10 7V4h4v3M7 7l1 13h8l1-13",
  save: "M12 4v11M7 11l5 5 5-5M5 20h14",
  open: "M12 16V5M7 9l5-5 5 5M5 20h14",
  alert: "M12 4l9 16H3zM12 10v4M12 17h.01",
} as const;

export type IconName = keyof typeof PATHS;

export function Icon({ name }: { name: IconName }) {
  return (
    <svg class={`icon icon-${name}`} viewBox="0 0 24 24" aria-hidden="true">
      <path d={PATHS[name]} />
    </svg>
  );
}

interface ButtonProps {
  icon: IconName;
  label: string;
  onClick: () => void;
  class?: string;
  pressed?: boolean;
  disabled?: boolean;
}

/** A button that shows an icon alone; its label is its name and its tooltip. */
export function IconButton({ icon, label, onClick, class: extra, pressed, disabled }: ButtonProps) {
  return (
    <button
      type="button"
      class={`icon-button ${extra ?? ""}`}
      aria-label={label}
      title={label}
      aria-pressed={pressed}
      disabled={disabled}
      onClick={onClick}
    >
      <Icon name={icon} />
    </button>
  );
}

/** The mark: a boat that lies level. */
export function Mark() {
  return (
    <svg class="mark" viewBox="0 0 32 32" aria-hidden="true">
      <rect width="32" height="32" rx="7" />
      <path class="sail" d="M16 5v14M16 7l7 10h-7M14.500 9.500L9 17h5.500" />
      <path class="hull" d="M5.500 20h21c-1.500 4-5 6-10.500 6S7 24 5.500 20z" />
    </svg>
  );
}
